// Every name looked up in a vendor's library. Tests hold them against the vendors' own packages.
#pragma once

namespace megatron_elastic::frequency {

inline constexpr const char* kDcmiSymbols[] = {
    "dcmi_init",
    "dcmi_get_card_num_list",
    "dcmi_get_device_id_in_card",
    "dcmi_get_device_frequency",
    "dcmi_get_device_info",
    "dcmi_set_device_info",
    "dcmi_get_device_power_info",
};

}  // namespace megatron_elastic::frequency
