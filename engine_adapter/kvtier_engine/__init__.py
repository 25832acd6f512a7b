"""The bundled engine: a paged-attention engine with an OpenAI API that uses KVTier fully."""
