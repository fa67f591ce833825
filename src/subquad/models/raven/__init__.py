"""Raven."""
