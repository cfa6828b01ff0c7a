"""Images that requests name by address: which addresses are allowed, and how they are fetched."""
