"""Gecko."""
