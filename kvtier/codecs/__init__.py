"""Block codecs: thin files over the kernels, which are imported on first use."""
