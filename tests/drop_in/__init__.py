"""Tests of programs written for neuronx-distributed."""
