"""What every room of the project uses: files that appear whole, checks of settings, the Hugging Face Hub."""
