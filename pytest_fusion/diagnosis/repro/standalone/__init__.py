"""What a stand-alone script of a failing case does: the source of these modules is copied into each script, whole.

So they import nothing but torch, the standard library and each other.
"""
