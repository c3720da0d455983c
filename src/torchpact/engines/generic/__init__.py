"""Engines for any kind of step: dense, compiled, and compact, in which halted rows leave the batch."""
