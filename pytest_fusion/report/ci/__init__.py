"""What continuous integration reads: JUnit properties and the step summary of GitHub Actions."""
