"""Serving a run over HTTP: completions as OpenAI's API has them, and named states."""
