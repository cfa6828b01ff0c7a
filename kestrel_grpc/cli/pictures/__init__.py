"""Draws results onto their image. Knows no server and no connection."""
