"""What a person runs: the command line, the local stack, jobs and their settings."""
