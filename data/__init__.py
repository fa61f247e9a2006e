"""How do messages become tokens and masks, and rows become batches?"""
