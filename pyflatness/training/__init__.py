"""Keep the loss flat while a network is trained."""
