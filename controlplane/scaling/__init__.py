"""Actuators: how a decided number of replicas comes about."""
