"""The bench of many models: a fleet that is made up, and what it costs while few of it are asked for."""
