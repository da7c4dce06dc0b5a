"""Exchange: moving tensors among the devices of a team."""
