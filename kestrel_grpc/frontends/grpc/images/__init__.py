"""`ImageService`: stores images, which requests then name instead of sending them."""
