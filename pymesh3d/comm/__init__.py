"""Communication: collectives, point-to-point channels, the compiled extension. Nothing above asks which back end serves it."""
