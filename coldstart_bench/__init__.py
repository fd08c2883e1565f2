"""Measures cold starts from outside, against a frozen floor and what a user would pick instead."""
