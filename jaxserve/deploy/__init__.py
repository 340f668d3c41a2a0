"""Deployments over more than one machine."""
