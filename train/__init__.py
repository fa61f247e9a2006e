"""How do samples become a weight update, safely, and how does a run explain itself?"""
