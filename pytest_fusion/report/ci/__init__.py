"""Reports for continuous integration: JUnit properties and the step summary of GitHub Actions."""
