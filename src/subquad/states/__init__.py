"""States of texts: files, sessions and prefix caches."""
