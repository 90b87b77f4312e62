"""OpenAI's files and batches: work that fills what interactive calls leave. docs/batch.md."""
