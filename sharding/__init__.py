"""Where arrays live: the device mesh, rules from logical to mesh axes, placement, collectives."""
