"""Model families: checkpoints, their catalogue, and the layer loop of each family."""
