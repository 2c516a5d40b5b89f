"""What the probe and the reload runtime both know about an `nn.Module`: its layers, its loaders, their selectors."""
