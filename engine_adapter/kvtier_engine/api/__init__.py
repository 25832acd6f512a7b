"""The OpenAI HTTP API over an engine: parsing, admission, rendering, streaming."""
