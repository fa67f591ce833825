"""Files and repositories: loading, saving, checks, export, push and cards."""
