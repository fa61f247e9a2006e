"""What a person types: thin mains, run with python -m scripts.NAME."""
