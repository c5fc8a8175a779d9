"""`trunkline train`: one YAML recipe in, a trained Hugging Face model folder out."""
