"""How much memory the host and the device have, and who may take how much of it."""
