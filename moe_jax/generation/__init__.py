"""What `generate` means: inputs, sampling, stopping and text, apart from any engine."""
