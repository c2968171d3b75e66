"""Reports: one record per test in, terminal lines, HTML, JSON, JUnit and CI summaries out."""
