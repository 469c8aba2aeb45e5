"""KDA token by token in plain torch: an example of a third-party backend of kda-core."""
