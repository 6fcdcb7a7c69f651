"""Models of several holders, weighed in the space of predictions: messages, weights, and the model that follows."""
