"""How ranks agree, and how jobs keep out of each other's way: agreement, lease, journal, intents."""
