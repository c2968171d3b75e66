"""The only importer of Triton's private names: corrects its interpreter and takes over its launches."""
