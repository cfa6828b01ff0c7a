"""How a client reaches its server: address, encryption, the channel, and why no server answers."""
