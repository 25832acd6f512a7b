"""What a codec costs in quality, measured on the user's own model and text: ``kvtier quality``."""
