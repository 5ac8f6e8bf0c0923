"""What an opened tag holds, seen as whole tensors, as a rank of any sizes, as Hugging Face or torch DCP see it."""
