"""Parts that several families of methods share."""
