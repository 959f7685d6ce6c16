"""Masks: what each element is as a function of its place, and which structure that amounts to."""
