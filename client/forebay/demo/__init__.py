"""The main job on real parts, as `forebay demo` runs it; its servers also serve the tests."""
