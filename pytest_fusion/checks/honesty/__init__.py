"""Check `honesty`: no cached answer, no result that changes later, no special behaviour under test."""
