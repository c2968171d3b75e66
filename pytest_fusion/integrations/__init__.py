"""What other pytest plugins get from this one: a module for each, which does nothing where that plugin is absent."""
