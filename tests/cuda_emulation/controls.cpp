// What tests ask of the emulation itself.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "emulation.h"

namespace emulation {

void define(pybind11::module_& module) {
  module.def("set_order", [](int number) { order = number; }, "In which threads run between barriers.");
  module.def("leave_out", [](const std::string& place) { change(place, Effect::none); }, "One barrier alone, or none.");
  module.def("weaken", [](const std::string& place) { change(place, Effect::of_warp); }, "To a barrier of a warp.");
  module.def("forget_barriers", [] { block.seen = 0; });
  const auto barriers = [] {
    std::vector<std::string> names;
    for (int i = 0; i < block.seen; ++i) names.push_back(block.sites[i].name);
    return names;
  };
  module.def("barriers", barriers, "That threads have come by since they were forgotten, as \"file:line\".");
}

}  // namespace emulation
