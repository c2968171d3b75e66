"""A rollout from shadow to rollback: two versions of softmax in a serving loop."""
