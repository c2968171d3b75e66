"""The only importer of Triton's private names: where its interpreter is corrected and its launches are taken over."""
