"""Hostile input: whatever a file says, reading it ends with what it holds or an error of ours, within a budget."""
