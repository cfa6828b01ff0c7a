"""Engines in processes of their own: what crosses between front ends and engine cores."""
