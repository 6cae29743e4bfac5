"""Command-line tools: data and models to start from, diagnosis, viewing."""
