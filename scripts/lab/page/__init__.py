"""The run's page in a browser: made-up runs, a browser without a window, and pictures."""
