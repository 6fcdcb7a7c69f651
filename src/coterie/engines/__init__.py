"""Where clients live when they are not in this process: Flower, NVIDIA FLARE, Ray."""
